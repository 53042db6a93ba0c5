"""Tools to give to an agent: functions such as `search_tool(...)` make a Tool."""
