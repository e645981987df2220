// Package e2e drives a real `space up` over HTTP, with real microVMs. Its tests are the promises of the product: each
// boots, breaks and inspects the running system from outside, through the same binary and API that users have.
//
// The tests need bin/space (SPACE_BIN names another) and share the image cache of the machine (SPACE_TEST_CACHE, else
// the user's cache folder), so that templates are built once. Each server has a data folder of its own and ends with
// its test; tests of one server may run at the same time.
package e2e
