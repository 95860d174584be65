// Swagger UI on this server's own OpenAPI document. A file of its own, because the page's policy allows no inline script.
window.addEventListener("DOMContentLoaded", () => {
  window.SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true });
});
