"""The parts of generate.py: a trained model's next tokens, and the text that they make."""
