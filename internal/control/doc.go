// Package control is the control plane: it records intents and their operations in one transaction, drives nodes
// towards them, and repairs by periodic reconciliation whatever a crash left between two steps. Service is what the
// API and other front ends call.
package control
