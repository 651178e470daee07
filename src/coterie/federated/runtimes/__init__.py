"""What carries questions and answers: this process, or Flower."""
