package wire

import (
	"log/slog"
	"net/url"
)

var mustURL = &url.URL{Path: "/"}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
