"""What is learned of a model and its loss before anything is changed."""
