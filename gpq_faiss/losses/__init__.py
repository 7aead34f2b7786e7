"""Losses: functions of tensors to a scalar."""
