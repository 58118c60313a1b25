//go:build tools

// Package tools names what is built, so that `go mod tidy` keeps what it needs.
package tools

import _ "k8s.io/kubernetes/cmd/kubelet"
