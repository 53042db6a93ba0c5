"""Model-written code, run on a server that speaks SandboxFusion's protocol."""
