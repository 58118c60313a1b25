// Package nvfm stands in for the bindings of NVIDIA's Fabric Manager: it reports that there is none. The DRA driver calls
// it only behind the feature gate FabricManagerPartitioning, which is off.
package nvfm

// Return is a status code.
type Return int

// SUCCESS is the only code that the driver compares with.
const (
	SUCCESS      Return = 0
	notConnected Return = -1
)

func (r Return) String() string { return "there is no Fabric Manager" }
func (r Return) Error() string  { return r.String() }

// The types below have the fields that the driver reads.
type (
	FabricPartitionId uint32
	LibraryOption     func()
	ConnectOption     func()

	GpuInfo struct {
		PhysicalId          uint32
		Uuid                [64]int8
		PciBusId            [32]int8
		NumNvLinksAvailable uint32
		MaxNumNvLinks       uint32
		NvlinkLineRateMBps  uint32
	}

	PartitionInfo struct {
		PartitionId FabricPartitionId
		IsActive    uint32
		NumGpus     uint32
		GpuInfo     [16]GpuInfo
	}

	FabricPartitionList struct {
		NumPartitions uint32
		PartitionInfo [64]PartitionInfo
	}

	Handle interface {
		GetSupportedFabricPartitions() (FabricPartitionList, Return)
		ActivateFabricPartition(FabricPartitionId) Return
		DeactivateFabricPartition(FabricPartitionId) Return
		Disconnect() Return
	}

	Interface interface {
		Init() Return
		Shutdown() Return
		Connect(...ConnectOption) (Handle, Return)
	}
)

type absent struct{}

func (absent) Init() Return                              { return notConnected }
func (absent) Shutdown() Return                          { return SUCCESS }
func (absent) Connect(...ConnectOption) (Handle, Return) { return nil, notConnected }

// New has the signature of the real one.
func New(...LibraryOption) Interface { return absent{} }

func WithLibraryPath(string) LibraryOption                    { return func() {} }
func WithUnixSocket(string) ConnectOption                     { return func() {} }
func WithAddress(string) ConnectOption                        { return func() {} }
func WithTimeoutMs[N ~int | ~uint32 | ~uint](N) ConnectOption { return func() {} }
