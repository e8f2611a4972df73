"""What would mend it, ranked by the bytes that each gives back."""
