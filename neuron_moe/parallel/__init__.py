"""What a rank owns, and how ranks talk."""
