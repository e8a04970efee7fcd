"""Tasks and graders behind one port."""
