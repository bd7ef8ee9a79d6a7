"""Operations that not every model has, one module a kind: functions over a Builder, called by families and by the parts they share."""
