"""What a training or inference step takes, known before it runs (`estimation`), and the step run inside a budget (`fitting`)."""
