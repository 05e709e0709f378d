"""What generate.py is made of: a trained model's next tokens, and the text that they make."""
