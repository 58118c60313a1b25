// Package main says what BuildKit thinks of a Dockerfile, as `docker build --check` does, and which files of the
// directory it would be sent. Nothing is fetched and nothing is built.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	iofs "io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/buildkit/client/llb"
	"github.com/moby/buildkit/client/llb/sourceresolver"
	"github.com/moby/buildkit/frontend/dockerfile/dockerfile2llb"
	"github.com/moby/buildkit/frontend/dockerui"
	"github.com/moby/patternmatcher/ignorefile"
	"github.com/opencontainers/go-digest"
	"github.com/tonistiigi/fsutil"
)

type warning struct {
	Rule   string `json:"rule"`
	Detail string `json:"detail"`
	Line   int32  `json:"line"`
}

type answer struct {
	Warnings []warning `json:"warnings"`
	Problem  string    `json:"problem"`
	Sent     []string  `json:"sent"`
}

// base stands for every image that a stage begins with.
type base struct{}

func (base) ResolveImageConfig(_ context.Context, ref string, _ sourceresolver.Opt) (string, digest.Digest, []byte, error) {
	config := []byte(`{"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}}`)
	return ref, digest.FromBytes(config), config, nil
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: dockerfile-check DIRECTORY [NAME=VALUE …]")
		os.Exit(2)
	}
	said, err := judge(context.Background(), os.Args[1], os.Args[2:])
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(said)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func judge(ctx context.Context, directory string, arguments []string) (*answer, error) {
	text, err := os.ReadFile(filepath.Join(directory, "Dockerfile"))
	if err != nil {
		return nil, err
	}
	given := map[string]string{}
	for _, one := range arguments {
		name, value, _ := strings.Cut(one, "=")
		given[name] = value
	}
	source := llb.NewSourceMap(nil, "Dockerfile", "Dockerfile", text)
	source.Definition = &llb.Definition{}
	results, err := dockerfile2llb.DockerfileLint(ctx, text, dockerfile2llb.ConvertOpt{
		Config:       dockerui.Config{BuildArgs: given},
		SourceMap:    source,
		MetaResolver: base{},
	})
	if err != nil {
		return nil, err
	}
	said := &answer{Warnings: []warning{}, Sent: []string{}}
	for _, one := range results.Warnings {
		found := warning{Rule: one.RuleName, Detail: one.Detail}
		if ranges := one.Location.GetRanges(); len(ranges) > 0 {
			found.Line = ranges[0].GetStart().GetLine()
		}
		said.Warnings = append(said.Warnings, found)
	}
	if results.Error != nil {
		said.Problem = results.Error.Message
	}
	said.Sent, err = sent(ctx, directory)
	return said, err
}

// sent is the build context: what .dockerignore leaves of the directory.
func sent(ctx context.Context, directory string) ([]string, error) {
	text, err := os.ReadFile(filepath.Join(directory, ".dockerignore"))
	if err != nil && !os.IsNotExist(err) {
		return nil, err
	}
	excludes, err := ignorefile.ReadAll(bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	whole, err := fsutil.NewFS(directory)
	if err != nil {
		return nil, err
	}
	left, err := fsutil.NewFilterFS(whole, &fsutil.FilterOpt{ExcludePatterns: excludes})
	if err != nil {
		return nil, err
	}
	files := []string{}
	err = left.Walk(ctx, "", func(path string, entry iofs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			files = append(files, filepath.ToSlash(path))
		}
		return err
	})
	return files, err
}
