// Requests to this server, with the API key of the settings where one is given.

export class KeyError extends Error {}

// Like fetch; throws a KeyError where the server (--api-key) wants another key.
export async function request(path, options = {}) {
  const { api_key: key = "" } = JSON.parse(localStorage.settings ?? "{}");
  const authorization = key.trim() ? { authorization: `Bearer ${key.trim()}` } : {};
  const response = await fetch(path, { ...options, headers: { ...options.headers, ...authorization } });
  if (response.status !== 401) return response;
  throw new KeyError(key.trim() ? "the server does not know the API key under Settings" : "the server wants an API key; enter it under Settings");
}
