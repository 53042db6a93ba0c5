"""Model cards of runs, and their models on the Hugging Face Hub."""
