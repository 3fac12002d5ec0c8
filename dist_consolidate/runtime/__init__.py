"""Moving bytes: process world, memory budget, transports and the pipeline."""
