"""What prepare_data.py is made of: reading and cleaning text, writing tokens."""
