// Package main asks policy-controller's own code what it thinks of a ClusterImagePolicy: first its validation, as its
// webhook has it, then which of the images that are given a policy's globs match. JSON goes out.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"

	"sigs.k8s.io/yaml"

	"github.com/sigstore/policy-controller/pkg/apis/glob"
	"github.com/sigstore/policy-controller/pkg/apis/policy/v1beta1"
)

type verdict struct {
	Name    string   `json:"name"`
	Problem string   `json:"problem"`
	Matched []string `json:"matched"`
}

func main() {
	text, err := os.ReadFile(os.Args[1])
	fatal(err)
	found := []verdict{}
	for _, document := range bytes.Split(text, []byte("\n---\n")) {
		found = append(found, judged(document, os.Args[2:]))
	}
	fatal(json.NewEncoder(os.Stdout).Encode(found))
}

func judged(document []byte, images []string) verdict {
	policy := v1beta1.ClusterImagePolicy{}
	fatal(yaml.UnmarshalStrict(document, &policy))
	ctx := context.Background()
	policy.SetDefaults(ctx)
	one := verdict{Name: policy.Name, Matched: []string{}}
	if problem := policy.Validate(ctx); problem != nil {
		one.Problem = problem.Error()
	}
	for _, image := range images {
		if matches(policy, image) {
			one.Matched = append(one.Matched, image)
		}
	}
	return one
}

func matches(policy v1beta1.ClusterImagePolicy, image string) bool {
	for _, pattern := range policy.Spec.Images {
		is, err := glob.Match(pattern.Glob, image)
		fatal(err)
		if is {
			return true
		}
	}
	return false
}

func fatal(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
