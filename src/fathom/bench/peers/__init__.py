"""Other people's systems, asked through one script each, in processes of their own."""
