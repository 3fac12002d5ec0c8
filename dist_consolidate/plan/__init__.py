"""What goes where: pure planning, without I/O and without torch.distributed."""
