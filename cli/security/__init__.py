"""`magnetar security …`: keys, certificates and tokens."""
