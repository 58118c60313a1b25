package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"sort"
	"sync"
	"time"
)

// The placeholders of a review's uid and number in the template.
const uidMark = "@UID@"

type order struct {
	url, ca, template, prefix, want string
	http2                           bool
	workers, count                  int
}

func loadFlags(flags *flag.FlagSet, args []string) order {
	var o order
	flags.StringVar(&o.url, "url", "", "where to send the reviews")
	flags.StringVar(&o.ca, "ca", "", "file with the CA")
	flags.StringVar(&o.template, "templates", "", "file with a JSON list of reviews; "+uidMark+" stands for the uid")
	flags.StringVar(&o.prefix, "prefix", "", "beginning of every uid; 24 characters make uids of 36")
	flags.StringVar(&o.want, "want", `"patch"`, "text that every good answer holds")
	flags.BoolVar(&o.http2, "http2", false, "one HTTP/2 connection instead of an HTTP/1.1 connection a worker")
	flags.IntVar(&o.workers, "workers", 20, "requests at a time")
	flags.IntVar(&o.count, "count", 1000, "requests in all")
	_ = flags.Parse(args) // exits on errors
	return o
}

type report struct {
	Count   int     `json:"count"`
	Lost    int     `json:"lost"`
	Refused int     `json:"refused"`
	First   string  `json:"first_problem,omitempty"`
	Proto   string  `json:"protocol"`
	Seconds float64 `json:"seconds"`
	Rate    float64 `json:"per_second"`
	P50     float64 `json:"p50_ms"`
	P99     float64 `json:"p99_ms"`
}

func load(o order) error {
	client, err := o.client()
	if err != nil {
		return err
	}
	bodies, err := o.bodies()
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(o.drive(client, bodies))
}

func (o order) client() (*http.Client, error) {
	ca, err := os.ReadFile(o.ca)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!o.http2)
	protocols.SetHTTP2(o.http2)
	transport := &http.Transport{
		TLSClientConfig:     &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
		Protocols:           protocols,
		MaxIdleConnsPerHost: o.workers,
		DisableCompression:  true,
	}
	return &http.Client{Transport: transport, Timeout: 30 * time.Second}, nil
}

// bodies are created before the measurement, each with its own uid.
func (o order) bodies() ([][]byte, error) {
	raw, err := os.ReadFile(o.template)
	if err != nil {
		return nil, err
	}
	var templates []json.RawMessage
	if err := json.Unmarshal(raw, &templates); err != nil {
		return nil, err
	}
	made := make([][]byte, o.count)
	for i := range made {
		uid := fmt.Sprintf("%s%012d", o.prefix, i)
		made[i] = bytes.ReplaceAll(templates[i%len(templates)], []byte(uidMark), []byte(uid))
	}
	return made, nil
}

type worker struct {
	times         []time.Duration
	lost, refused int
	first, proto  string
}

func (o order) drive(client *http.Client, bodies [][]byte) report {
	workers := make([]worker, o.workers)
	_, _ = ask(client, o.url, bodies[0]) // opens the connection; HTTP/2 needs it before concurrent requests
	var wait sync.WaitGroup
	start := time.Now()
	for n := range workers {
		wait.Go(func() {
			for i := n; i < len(bodies); i += o.workers {
				workers[n].ask(client, o, bodies[i])
			}
		})
	}
	wait.Wait()
	return summary(workers, time.Since(start))
}

func (w *worker) ask(client *http.Client, o order, body []byte) {
	start := time.Now()
	proto, answer := ask(client, o.url, body)
	w.times = append(w.times, time.Since(start))
	switch {
	case proto == "":
		w.lost++
	case !bytes.Contains(answer, []byte(o.want)):
		w.refused++
	default:
		w.proto = proto
		return
	}
	if w.first == "" {
		w.first = string(answer[:min(len(answer), 300)])
	}
}

// ask returns the protocol and the body; an empty protocol means that there was no answer.
func ask(client *http.Client, url string, body []byte) (string, []byte) {
	response, err := client.Post(url, "application/json", bytes.NewReader(body))
	if err != nil {
		return "", []byte(err.Error())
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		return "", fmt.Appendf(answer, " %s %v", response.Status, err)
	}
	return response.Proto, answer
}

func summary(workers []worker, took time.Duration) report {
	var times []time.Duration
	r := report{Seconds: took.Seconds()}
	for _, w := range workers {
		times = append(times, w.times...)
		r.Lost += w.lost
		r.Refused += w.refused
		if r.First == "" {
			r.First = w.first
		}
		if w.proto != "" {
			r.Proto = w.proto
		}
	}
	sort.Slice(times, func(i, j int) bool { return times[i] < times[j] })
	r.Count = len(times)
	r.Rate = float64(r.Count) / took.Seconds()
	r.P50 = times[len(times)/2].Seconds() * 1e3
	r.P99 = times[len(times)*99/100].Seconds() * 1e3
	return r
}
