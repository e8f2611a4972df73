"""The device level of the array engine: the same graph, plan and passes, the work done on a GPU inside a budget of its
own."""
