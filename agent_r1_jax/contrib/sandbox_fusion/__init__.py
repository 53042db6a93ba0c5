"""Code that a model wrote, run on a server that speaks the protocol of SandboxFusion."""
