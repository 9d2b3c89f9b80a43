// FILES and DIGEST stand above, written when the folder was made.
const NAME = `napkinmath ${self.registration.scope} `;

self.addEventListener("install", (event) => {
  const fresh = FILES.map((file) => new Request(file, { cache: "reload" }));
  event.waitUntil(caches.open(NAME + DIGEST).then((cache) => cache.addAll(fresh)).then(() => self.skipWaiting()));
});
self.addEventListener("activate", (event) => {
  const away = (name) => name.startsWith(NAME) && name !== NAME + DIGEST;
  event.waitUntil(caches.keys().then((names) => Promise.all(names.filter(away).map((name) => caches.delete(name)))).then(() => self.clients.claim()));
});
self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (new URL(request.url).origin !== self.location.origin) return event.respondWith(Response.error()); // nothing leaves this page's host
  if (request.method !== "GET") return;
  event.respondWith(caches.open(NAME + DIGEST).then((cache) => cache.match(request, { ignoreSearch: true })).then((found) => found || fetch(request)));
});
