/* libcuda.so.1: nothing calls it, but a driver without it is not taken for one. */
int cuInit(unsigned flags)
{
	(void)flags;
	return 0;
}
