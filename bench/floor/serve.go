package main

import (
	"context"
	"encoding/json"
	"net/http"
	"os/signal"
	"syscall"

	"github.com/go-logr/logr"
	"gomodules.xyz/jsonpatch/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"
)

// serve runs two webhooks until SIGTERM: one like controller-runtime's examples, and a minimal one.
func serve(port int, certificates string) error {
	log.SetLogger(logr.Discard())
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return err
	}
	server := webhook.NewServer(webhook.Options{Host: "127.0.0.1", Port: port, CertDir: certificates})
	server.Register("/mutate", &admission.Webhook{Handler: &annotator{admission.NewDecoder(scheme)}})
	server.Register("/minimal", &admission.Webhook{Handler: admission.HandlerFunc(patched)})
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	return server.Start(ctx)
}

type annotator struct{ decoder admission.Decoder }

func (a *annotator) Handle(_ context.Context, request admission.Request) admission.Response {
	pod := &corev1.Pod{}
	if err := a.decoder.Decode(request, pod); err != nil {
		return admission.Errored(http.StatusBadRequest, err)
	}
	if pod.Annotations == nil {
		pod.Annotations = map[string]string{}
	}
	pod.Annotations["bench.example/seen"] = "true"
	raw, err := json.Marshal(pod)
	if err != nil {
		return admission.Errored(http.StatusInternalServerError, err)
	}
	return admission.PatchResponseFromRaw(request.Object.Raw, raw)
}

// patched does not read the pod.
func patched(context.Context, admission.Request) admission.Response {
	return admission.Patched("", jsonpatch.NewOperation("add", "/metadata/annotations/bench.example~1seen", "true"))
}
