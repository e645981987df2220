// Package client is the Go client of the native HTTP API.
//
// A Client is safe for concurrent use and holds nothing but pooled connections. Errors of the API are *Error; what
// keeps the server from being reached is wrapped as it is. Every call ends with its context.
//
// Events follows a command: when the connection breaks it is made again with Last-Event-ID, so that the handler sees
// every event once and in order. It gives up when nothing has arrived for Config.GiveUp. The handler runs in the
// caller's goroutine; a slow one delays only this reader.
package client
