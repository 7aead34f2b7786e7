"""Losses: functions of tensors to a scalar, and losses of plugins."""
