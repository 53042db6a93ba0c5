"""Models as judges: critics and reward models that choose or score replies."""
