"""Training: the Step in a loop, with data, a schedule, validation and checkpoints."""
