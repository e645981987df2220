package config

import (
	"fmt"
	"strings"
)

// Markdown returns the reference of all settings, the content of docs/configuration.md.
func Markdown() (string, error) {
	settings, err := Settings(&Config{})
	if err != nil {
		return "", err
	}
	var b strings.Builder
	b.WriteString(`# Configuration of ` + "`space up`" + `

This page is generated from the settings themselves; a test fails when it is out of date.

Each setting can be given as a flag, as an environment variable, or as a key of the file that ` + "`--config`" + ` (or
` + "`SPACE_CONFIG`" + `) names, in YAML (` + "`.yaml`, `.yml`" + `) or TOML (` + "`.toml`" + `). A flag wins over the environment, the
environment over the file, the file over the default. An unknown key in the file is an error.

| flag | environment | key | type | default | meaning |
|---|---|---|---|---|---|
`)
	for _, s := range settings {
		def := "see meaning"
		if s.Default != "" {
			def = "`" + s.Default + "`"
		} else if s.Type() == "list" || s.Flag == "data-plane-url" {
			def = "none"
		}
		fmt.Fprintf(&b, "| `--%s` | `%s` | `%s` | %s | %s | %s |\n", s.Flag, s.Env, s.Key, s.Type(), def, s.Doc)
	}
	b.WriteString(`
## Clients

The other commands read these variables:

| variable | default | meaning |
|---|---|---|
| ` + "`SPACE_API_URL` | `http://127.0.0.1:8700`" + ` | Where the native API is. |
| ` + "`SPACE_DATA_PLANE_URL`" + ` | what the server names | Where the data plane is. |
| ` + "`SPACE_API_TOKEN` | `admin.key`" + ` of the data folder | API key. |
| ` + "`SPACE_DATA_DIR`" + ` | as for ` + "`space up`" + ` | Data folder in which the admin key is looked for. |
`)
	return b.String(), nil
}
