"""What schedulers are told, and what is done for pods that wait for one."""
