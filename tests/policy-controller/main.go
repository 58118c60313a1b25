// Package main asks policy-controller's own code what it thinks of ClusterImagePolicies: first its validation, as its
// webhook has it, then which of the images that are given a policy's globs match, and which of the statements on stdin,
// once somebody has verified their signatures, would satisfy it. JSON goes out.
package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"

	"sigs.k8s.io/yaml"

	"github.com/sigstore/cosign/v2/pkg/policy"
	"github.com/sigstore/policy-controller/pkg/apis/glob"
	"github.com/sigstore/policy-controller/pkg/apis/policy/v1beta1"
)

type verdict struct {
	Name      string   `json:"name"`
	Problem   string   `json:"problem"`
	Matched   []string `json:"matched"`
	Satisfied []bool   `json:"satisfied"`
}

// signed is a statement in the envelope that it is signed in.
type signed []byte

func (statement signed) Payload() ([]byte, error) {
	return json.Marshal(map[string]string{"payload": base64.StdEncoding.EncodeToString(statement)})
}

func main() {
	text, err := os.ReadFile(os.Args[1])
	fatal(err)
	statements := []json.RawMessage{}
	fatal(json.NewDecoder(os.Stdin).Decode(&statements))
	found := []verdict{}
	for _, document := range bytes.Split(text, []byte("\n---\n")) {
		found = append(found, judged(document, os.Args[2:], statements))
	}
	fatal(json.NewEncoder(os.Stdout).Encode(found))
}

func judged(document []byte, images []string, statements []json.RawMessage) verdict {
	one := v1beta1.ClusterImagePolicy{}
	fatal(yaml.UnmarshalStrict(document, &one))
	ctx := context.Background()
	one.SetDefaults(ctx)
	said := verdict{Name: one.Name, Matched: []string{}, Satisfied: []bool{}}
	if problem := one.Validate(ctx); problem != nil {
		said.Problem = problem.Error()
	}
	for _, image := range images {
		if matches(one, image) {
			said.Matched = append(said.Matched, image)
		}
	}
	for _, statement := range statements {
		said.Satisfied = append(said.Satisfied, satisfies(ctx, one, signed(statement)))
	}
	return said
}

func matches(one v1beta1.ClusterImagePolicy, image string) bool {
	for _, pattern := range one.Spec.Images {
		is, err := glob.Match(pattern.Glob, image)
		fatal(err)
		if is {
			return true
		}
	}
	return false
}

// satisfies goes the way of policy-controller's validator, from a verified attestation on.
func satisfies(ctx context.Context, one v1beta1.ClusterImagePolicy, statement signed) bool {
	for _, authority := range one.Spec.Authorities {
		for _, wanted := range authority.Attestations {
			payload, _, err := policy.AttestationToPayloadJSON(ctx, wanted.PredicateType, statement)
			if err != nil || payload == nil {
				return false
			}
			warned, err := policy.EvaluatePolicyAgainstJSON(ctx, wanted.Name, wanted.Policy.Type, wanted.Policy.Data, payload)
			if err != nil || warned != nil {
				return false
			}
		}
	}
	return true
}

func fatal(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
