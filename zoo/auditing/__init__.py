"""The audit: will every parameter that should learn, learn? `zoo.audit` is in `report`."""
