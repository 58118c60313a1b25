//go:build tools

// Package tools names what is built, so that `go mod tidy` keeps what it needs.
package tools

import _ "github.com/NVIDIA/k8s-device-plugin/cmd/nvidia-device-plugin"
