# Plain `make` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

GO := scripts/go
GOBUILD := CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false
PARTS := internal/embedded/bin
# The version of this tree, with the commit where it is a clone.
VERSION := $(shell cat VERSION)$(shell git rev-parse --short=12 HEAD 2>/dev/null | sed 's/^/+/')

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: quickstart
quickstart: setup build ## install what is missing, build, start the platform, run a command in a first microVM
	@scripts/quickstart.sh

.PHONY: setup
setup: ## install packages and Go if they are missing (idempotent; says what it does)
	@scripts/setup.sh

.PHONY: build
build: ## compile bin/space with the guest agent and the shim inside (no root; no network once modules are cached)
	@mkdir -p bin $(PARTS)
	$(GOBUILD) -ldflags '-s -w' -o $(PARTS)/space-agent ./cmd/space-agent
	$(GOBUILD) -ldflags '-s -w' -o $(PARTS)/space-shim ./cmd/space-shim
	$(GOBUILD) -ldflags '-X github.com/space-sandbox/space/internal/cli.linked=$(VERSION)' -o bin/space ./cmd/space

.PHONY: test
test: ## set up, build, lint and run every test, unit and end-to-end on real microVMs
	@scripts/test.sh

.PHONY: unit
unit: ## run the unit tests with the race detector
	$(GO) test -race -timeout 15m ./cmd/... ./internal/...

.PHONY: e2e
e2e: build ## run the end-to-end tests on real microVMs
	$(GO) test -count=1 -timeout 40m ./test/...

.PHONY: soak
soak: build ## churn sandboxes for an hour (SPACE_SOAK=2h for longer) and fail on anything that grows
	SPACE_SOAK=$${SPACE_SOAK:-1h} $(GO) test -count=1 -timeout 0 -v -run 'Soak|Churn' ./test/...

.PHONY: lint
lint: ## run golangci-lint, buf lint and the check for breaking changes of the protocols
	@scripts/tools.sh
	.cache/bin/golangci-lint run ./...
	.cache/bin/buf lint
	.cache/bin/buf breaking --against api/proto.binpb

.PHONY: proto
proto: ## regenerate the Go code of the protocols
	@scripts/tools.sh buf
	PATH="$$PWD/scripts:$$PATH" .cache/bin/buf generate

.PHONY: proto-baseline
proto-baseline: ## accept the present protocols as what later ones must be compatible with
	@scripts/tools.sh buf
	.cache/bin/buf build --as-file-descriptor-set -o api/proto.binpb

.PHONY: fmt
fmt: ## format the Go code and the protocols
	@scripts/tools.sh buf
	$(GO) fmt ./...
	.cache/bin/buf format -w

.PHONY: clean
clean: ## remove what building made here (the cache of images and tools stays)
	rm -rf bin
	find $(PARTS) -type f ! -name .gitkeep -delete
