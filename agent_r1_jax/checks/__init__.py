"""What is looked at before a run or beside it: settings, sizes, memory, environments."""
