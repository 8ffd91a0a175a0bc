package dashboard_test

import (
	"encoding/base64"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/writegate/writegate/internal/dashboard"
)

// Without a token, whatever a browser writes as Host, it is answered only where that names this machine itself: a page elsewhere can
// make any name of its own point here, but not one of these.
func FuzzHost(f *testing.F) {
	for _, seed := range []string{
		"localhost", "LOCALHOST:8480", "127.0.0.1", "127.1.2.3:80", "[::1]:8480", "::1", "[::ffff:127.0.0.1]", "example.net", "localhost.example.net", "127.0.0.1.nip.io", "localhost.",
		"", ":80", "[localhost]", "0.0.0.0", "[::]", "192.168.1.1", "localhost:80:80", "a@localhost", "localhost/", "lоcalhost", "[::1%lo]", "2130706433", "0x7f.1", "]localhost[", "[[::1]]:1",
	} {
		f.Add(seed, "/?host="+url.QueryEscape(seed))
	}
	d := dashboard.New(config())
	f.Cleanup(d.Close)
	f.Fuzz(func(t *testing.T, name, path string) {
		r := httptest.NewRequest(http.MethodGet, "/healthz", nil)
		r.Host = name
		if u, err := url.ParseRequestURI(path); err == nil && u.Host == "" {
			r.URL = u // what is asked for, and with which parameters, changes nothing
		}
		w := httptest.NewRecorder()
		d.ServeHTTP(w, r)
		// Whose it is, by the parser of URLs, as the browser that made the header took it from one.
		here := false
		if u, err := url.Parse("http://" + name + "/"); err == nil && u.User == nil && u.Path == "/" {
			ip := net.ParseIP(u.Hostname())
			here = strings.EqualFold(u.Hostname(), "localhost") || ip != nil && ip.IsLoopback()
		}
		if here {
			require.NotEqual(t, http.StatusMisdirectedRequest, w.Code, "%q", name)
		} else if strings.Trim(name, "[]:0123456789abcdef.") != "" && !strings.Contains(strings.ToLower(name), "localhost") {
			require.Equal(t, http.StatusMisdirectedRequest, w.Code, "%q", name)
		}
		if w.Code != http.StatusMisdirectedRequest {
			host, _, err := net.SplitHostPort(name)
			if err != nil {
				host = name
			}
			host = strings.ToLower(strings.Trim(host, "[]"))
			require.True(t, host == "localhost" || net.ParseIP(host).IsLoopback(), "%q", name)
		}
		require.NotEmpty(t, w.Header().Get("Content-Security-Policy"))
	})
}

// With a token, nothing but that token is let in, whatever way it is written in; and no answer has it in it.
func FuzzToken(f *testing.F) {
	const token = "0123456789:abcdef é"
	for _, seed := range []string{
		"Bearer " + token, "bearer " + token, "Bearer  " + token, "Bearer" + token, "Bearer\t" + token, token, "", "Basic", "Basic " + base64.StdEncoding.EncodeToString([]byte("u:"+token)),
		"basic " + base64.StdEncoding.EncodeToString([]byte(":"+token)), "Basic " + base64.StdEncoding.EncodeToString([]byte(token)), "Basic " + base64.URLEncoding.EncodeToString([]byte("u:"+token)),
		"Basic " + base64.StdEncoding.EncodeToString([]byte("u:"+token+"\n")), "Bearer " + token[:len(token)-1], "Digest " + token, "Bearer 0123456789", "Basic !!!", "Bearer " + token + ",",
	} {
		f.Add(seed, "/?token="+url.QueryEscape(token), token)
	}
	cfg := config()
	cfg.Token = token
	d := dashboard.New(cfg)
	f.Cleanup(d.Close)
	f.Fuzz(func(t *testing.T, authorization, path, guess string) {
		ask := func(header string) (int, string) {
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			if u, err := url.ParseRequestURI(path); err == nil && !strings.HasSuffix(u.Path, "healthz") {
				r.URL = u
			}
			r.Header["Authorization"] = []string{header}
			w := httptest.NewRecorder()
			d.ServeHTTP(w, r)
			body, err := io.ReadAll(w.Body)
			require.NoError(t, err)
			return w.Code, string(body)
		}
		code, body := ask(authorization)
		// It holds the token, all of it and nothing else, or it does not.
		given := ""
		if scheme, rest, _ := strings.Cut(authorization, " "); strings.EqualFold(scheme, "bearer") {
			given = rest
		} else if strings.EqualFold(scheme, "basic") {
			if decoded, err := base64.StdEncoding.DecodeString(rest); err == nil {
				_, given, _ = strings.Cut(string(decoded), ":")
			}
		}
		require.Equal(t, given != token, code == http.StatusUnauthorized, "%q", authorization)
		require.NotContains(t, body, token)
		for _, header := range []string{"Bearer " + guess, "Basic " + base64.StdEncoding.EncodeToString([]byte("anybody:"+guess))} {
			code, _ := ask(header)
			require.Equal(t, guess != token, code == http.StatusUnauthorized, "%q", header)
		}
	})
}
