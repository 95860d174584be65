from app.drafters.cli import main

raise SystemExit(main())
