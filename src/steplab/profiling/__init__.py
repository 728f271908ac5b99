"""Recording a step: lean traces for its times, one step in detail for who did what."""
