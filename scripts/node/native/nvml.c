/*
 * libnvidia-ml.so.1 for a machine without GPUs. Its GPUs are the lines "UUID product" of the file $MOCK_NVML_GPUS.
 * nvml.h is go-nvml's, where a handle is a struct of one pointer: the ABI is the same. build.py makes a function that
 * answers NVML_ERROR_NOT_SUPPORTED for each one that nvml.h declares and this file does not define.
 */
#include "nvml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define MOST 64
#define MEMORY (80ull << 30)
#define PCI_ID 0x233010DEu /* an H100 */
#define BUS_OF_FIRST 0x10u

struct nvmlDevice_st {
	char uuid[96], product[96];
	unsigned index;
};

static struct nvmlDevice_st gpus[MOST];
static unsigned count;
static int event_set;

static nvmlReturn_t load(void)
{
	const char *path = getenv("MOCK_NVML_GPUS");
	FILE *file = path ? fopen(path, "r") : NULL;
	char line[256];

	if (!file)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	for (count = 0; count < MOST && fgets(line, sizeof line, file);) {
		struct nvmlDevice_st gpu = {.index = count};
		if (sscanf(line, "%95s %95[^\n]", gpu.uuid, gpu.product) == 2)
			gpus[count++] = gpu;
	}
	fclose(file);
	return NVML_SUCCESS;
}

static nvmlReturn_t put(char *to, unsigned room, const char *text)
{
	if (strlen(text) >= room)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(to, text);
	return NVML_SUCCESS;
}

static nvmlDevice_t handle_of(unsigned index)
{
	nvmlDevice_t device = {.handle = &gpus[index]};
	return device;
}

/* The library and the machine. */

nvmlReturn_t nvmlInit_v2(void) { return load(); }
#undef nvmlInit
nvmlReturn_t nvmlInit(void) { return load(); }
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; return load(); }
nvmlReturn_t nvmlShutdown(void) { return NVML_SUCCESS; }

const char *nvmlErrorString(nvmlReturn_t code)
{
	static char text[40];

	snprintf(text, sizeof text, "mock NVML return %d", code);
	return text;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *to, unsigned room) { return put(to, room, DRIVER); }
nvmlReturn_t nvmlSystemGetNVMLVersion(char *to, unsigned room) { return put(to, room, "13." DRIVER); }
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *to) { *to = 13000; return NVML_SUCCESS; }
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *to) { *to = 13000; return NVML_SUCCESS; }

/* How a GPU is found. */

static void bus_of(unsigned index, char *to, size_t room, const char *form)
{
	snprintf(to, room, form, 0, BUS_OF_FIRST + index, 0);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *to) { *to = count; return NVML_SUCCESS; }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *to)
{
	if (index >= count)
		return NVML_ERROR_INVALID_ARGUMENT;
	*to = handle_of(index);
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *to)
{
	for (unsigned index = 0; index < count; index++) {
		if (!strcmp(gpus[index].uuid, uuid)) {
			*to = handle_of(index);
			return NVML_SUCCESS;
		}
	}
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *to)
{
	for (unsigned index = 0; index < count; index++) {
		char bus[32];

		bus_of(index, bus, sizeof bus, "%08X:%02X:%02X.0");
		if (!strcasecmp(bus, id) || !strcasecmp(bus + 4, id)) {
			*to = handle_of(index);
			return NVML_SUCCESS;
		}
	}
	return NVML_ERROR_NOT_FOUND;
}

/* What a GPU is. */

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t of, nvmlPciInfo_t *to)
{
	memset(to, 0, sizeof *to);
	bus_of(of.handle->index, to->busIdLegacy, sizeof to->busIdLegacy, "%04X:%02X:%02X.0");
	bus_of(of.handle->index, to->busId, sizeof to->busId, "%08X:%02X:%02X.0");
	to->bus = BUS_OF_FIRST + of.handle->index;
	to->pciDeviceId = PCI_ID;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t of, char *to, unsigned room)
{
	char serial[16];

	snprintf(serial, sizeof serial, "165000000%04u", of.handle->index % 1000);
	return put(to, room, serial);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t of, nvmlMemory_t *to)
{
	(void)of;
	*to = (nvmlMemory_t){.total = MEMORY, .free = MEMORY};
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t of, nvmlMemory_v2_t *to)
{
	(void)of;
	to->total = to->free = MEMORY;
	to->used = to->reserved = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t of, int *major, int *minor)
{
	(void)of;
	*major = 9;
	*minor = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t of, unsigned *to) { *to = of.handle->index; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t of, unsigned *to) { *to = of.handle->index; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t of, char *to, unsigned room) { return put(to, room, of.handle->uuid); }
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t of, char *to, unsigned room) { return put(to, room, of.handle->product); }

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t of, nvmlDeviceArchitecture_t *to)
{
	(void)of;
	*to = NVML_DEVICE_ARCH_HOPPER;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t of, nvmlBrandType_t *to)
{
	(void)of;
	*to = NVML_BRAND_NVIDIA;
	return NVML_SUCCESS;
}

/* The device plugin fails every pod without it. */
nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, nvmlGpuTopologyLevel_t *to)
{
	(void)one;
	(void)other;
	*to = NVML_TOPOLOGY_NODE;
	return NVML_SUCCESS;
}

/* There is no MIG. */

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t of, unsigned *to) { (void)of; *to = 0; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t of, unsigned *to) { (void)of; *to = 0; return NVML_SUCCESS; }

/* Nothing ever happens to a GPU. */

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t of, unsigned long long *to)
{
	(void)of;
	*to = nvmlEventTypeXidCriticalError;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *to) { to->handle = (void *)&event_set; return NVML_SUCCESS; }
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) { (void)set; return NVML_SUCCESS; }

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t of, unsigned long long types, nvmlEventSet_t set)
{
	(void)of;
	(void)types;
	(void)set;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *to, unsigned milliseconds)
{
	(void)set;
	(void)to;
	usleep(milliseconds * 1000);
	return NVML_ERROR_TIMEOUT;
}
