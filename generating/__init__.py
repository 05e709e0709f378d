"""The parts of generate.py: loading a model, sampling its next tokens, turning them into text."""
