// Floor is the reference for gpuwarden's throughput: a controller-runtime webhook that only adds an annotation, and the
// client that puts the same load on every server.
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "floor:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("say serve or load")
	}
	flags := flag.NewFlagSet(args[0], flag.ExitOnError)
	switch args[0] {
	case "serve":
		port := flags.Int("port", 0, "port on 127.0.0.1")
		certificates := flags.String("certificates", "", "directory with tls.crt and tls.key")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		return serve(*port, *certificates)
	case "load":
		return load(loadFlags(flags, args[1:]))
	}
	return fmt.Errorf("there is no command %q", args[0])
}
