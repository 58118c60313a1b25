// Says of each token what go-spiffe makes of it.
package main

import (
	"encoding/json"
	"log"
	"os"

	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
)

type question struct {
	TrustDomain string `json:"trustDomain"`
	Bundle      string `json:"bundle"`
	Tokens      []struct {
		Token    string `json:"token"`
		Audience string `json:"audience"`
	} `json:"tokens"`
}

type answer struct {
	ID    string `json:"id"`
	Error string `json:"error"`
}

func main() {
	var asked question
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		log.Fatal(err)
	}
	domain, err := spiffeid.TrustDomainFromString(asked.TrustDomain)
	if err != nil {
		log.Fatal(err)
	}
	bundle, err := spiffebundle.Parse(domain, []byte(asked.Bundle))
	if err != nil {
		log.Fatal(err)
	}
	answers := []answer{}
	for _, one := range asked.Tokens {
		svid, err := jwtsvid.ParseAndValidate(one.Token, bundle, []string{one.Audience})
		if err != nil {
			answers = append(answers, answer{Error: err.Error()})
		} else {
			answers = append(answers, answer{ID: svid.ID.String()})
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(answers); err != nil {
		log.Fatal(err)
	}
}
