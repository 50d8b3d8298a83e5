"""How ranks come together: what the launcher was asked for, who is where, and over which network."""
