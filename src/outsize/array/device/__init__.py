"""The array engine on a device: the same graph, plan and passes, the work done on a GPU inside a budget of its own."""
