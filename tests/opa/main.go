// Answers calls of SPIRE Server by a policy, as the server's own engine does.
package main

import (
	"context"
	"encoding/json"
	"log"
	"os"

	"github.com/open-policy-agent/opa/v1/rego"
	"github.com/open-policy-agent/opa/v1/storage/inmem"
)

type question struct {
	Policy string           `json:"policy"`
	Data   map[string]any   `json:"data"`
	Calls  []map[string]any `json:"calls"`
}

func main() {
	var asked question
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	query, err := rego.New(
		rego.Query("data.spire.result"),
		rego.Module("policy.rego", asked.Policy),
		rego.Store(inmem.NewFromObject(asked.Data)),
	).PrepareForEval(ctx)
	if err != nil {
		log.Fatal(err)
	}
	answers := []any{}
	for _, call := range asked.Calls {
		found, err := query.Eval(ctx, rego.EvalInput(call))
		if err != nil || len(found) != 1 {
			log.Fatal(err, len(found))
		}
		answers = append(answers, found[0].Expressions[0].Value)
	}
	if err := json.NewEncoder(os.Stdout).Encode(answers); err != nil {
		log.Fatal(err)
	}
}
