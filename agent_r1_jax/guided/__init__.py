"""Models that judge: critics and reward models that choose replies or score them."""
