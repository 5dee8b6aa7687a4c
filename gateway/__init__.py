"""The HTTP gateway: `/v1/videos` over gRPC to the models `h3_prepare` and `h3_stream`.

From outside: `settings.GatewaySettings`, `app.create_app` and `server.serve`. It runs no engine and needs no GPU.
"""
