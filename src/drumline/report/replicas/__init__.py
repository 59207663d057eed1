"""One step of many copies of a pipeline that exchange gradients: simulated action by action, attributed and drawn."""
